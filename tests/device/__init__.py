"""A simulated accelerator: torch's device ``simdev``, on a machine without one.

It behaves as a CUDA card does where that matters for correctness:

* **Memory that the host cannot touch.** Code that reads a device pointer on the host dies at once,
  and an operator refuses to mix tensors of the host and the device.
* **Streams whose work runs late**, in a random order that one seed repeats. Nothing runs until the
  host waits for it, or by chance. Operators run the CPU's kernels, so the same program at lateness
  1.0, where everything runs at once, is its own exact reference.
* **CUDA's allocator.** Freed memory becomes NaN in the order of the stream that allocated it; only
  ``record_stream`` makes it wait for another stream. Copies from page-locked memory run late and
  read the memory when they run; copies to pageable memory make the host wait.
* **Counts** of host synchronisations by cause and of bytes per direction.
* **Virtual time**, which follows from a card's rates and from what each task depends on, and not
  from the order in which tasks happen to run.

Use, in a test::

    from tests.device import on_device

    @on_device(seed=3, lateness=0.02)
    def test_something():
        x = torch.ones(4).to("simdev")

``on_device`` runs the body in a process of its own (several with ``ranks=2``), because a device
changes torch for the whole process. In a script, call ``install()`` first; it may be called again.
Then:

* ``torch.simdev`` has what ``torch.cuda`` has (streams, events, memory figures, generators, …), and
* ``seed_order(seed, lateness, ahead)`` starts a new random order: ``lateness`` is the chance that
  a task runs after another was queued (1.0: at once; 0.02: very late), ``ahead`` the number of
  tasks that may wait before the host must work;
* ``counts()`` and ``reset_counts()``: how often what happened. ``HOST_WAITS`` names the causes of
  host synchronisations; ``host_waits()`` returns those that happened, and the context manager
  ``places_of_waits()`` says in which lines. Counts that begin with ``drained`` are work that ran
  early although no card would have made the host wait;
* ``limit(bytes)``: the size of the device's memory;
* ``clock``: virtual time, see ``tests.device.simdev.Clock``.

DeepSpeed gets an accelerator, and ``torch.distributed`` the backend ``simccl``.
"""

from tests.device.running import on_device
from tests.device.start import install

__all__ = ["install", "on_device"]
