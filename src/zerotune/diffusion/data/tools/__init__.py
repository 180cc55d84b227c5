"""What few runs need: nothing else in zerotune imports these modules, each stands on its own.

``priors`` keeps what a model knows of a class beside the one instance it learns (DreamBooth);
``hugging_face`` reads Hugging Face's and torchvision's map-style datasets, with ``zerotune[data]``.
"""
