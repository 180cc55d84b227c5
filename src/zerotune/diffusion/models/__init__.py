"""One file per family of models: what a batch means to it and how it is called."""
