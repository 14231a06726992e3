"""Feeding the loop: shared memory, open files, workers, and where the data lie."""

from __future__ import annotations

from collections.abc import Iterator

from fettle.doctor._check import Finding, check, error, note, warning
from fettle.doctor.environment import Environment
from fettle.units import count_text, size_text

REMOTE = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "glusterfs", "beegfs", "9p", "afs",
          "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.mount-s3", "fuse.blobfuse2", "fuse.juicefs")  # fmt: skip
"""File systems on which every small read goes over a network."""
_CACHES = ("HF_HOME", "HF_DATASETS_CACHE", "TORCH_HOME")
_DOCKER_BYTES = 64 << 20


@check()
def small_shared_memory(here: Environment) -> Iterator[Finding]:
    """/dev/shm too small for the batches in flight, or as small as Docker makes it."""
    mend = "docker run --shm-size=8g ...  # or --ipc=host"
    if not here.files.exists("/dev/shm"):
        return
    free = here.files.free_bytes("/dev/shm")
    for loader in here.program.loaders:
        flight = loader.workers * loader.prefetch * loader.batch_bytes
        if 0 <= free < flight:
            yield error(f"/dev/shm has {size_text(free)} free, and {loader.name} keeps {size_text(flight)} in flight "
                        f"({loader.workers} workers x {loader.prefetch} batches x {size_text(loader.batch_bytes)}).",
                        "Workers die with 'Bus error'.", mend)  # fmt: skip
            return
    if 0 <= free <= _DOCKER_BYTES:
        yield warning(f"/dev/shm has {size_text(free)} free.",
                      "Workers hand batches over there, and die with 'Bus error' where it is full.", mend)  # fmt: skip


@check()
def few_open_files(here: Environment) -> Iterator[Finding]:
    """A limit on open files below what tensors on their way need: each is a file descriptor."""
    by_file = here.program.sharing in ("", "file_descriptor")
    for loader in here.program.loaders:
        needed = loader.workers * loader.prefetch * loader.tensors
        if by_file and needed > here.open_files / 2:
            yield warning(f"A process may open {here.open_files:.0f} files, and {loader.name} has up to {needed} "
                          "tensors on their way.", "'Too many open files', or 'received 0 items of ancdata'.",
                          "ulimit -n 65536")  # fmt: skip
            return
    if here.open_files < 1024:
        yield warning(f"A process may open {here.open_files:.0f} files.",
                      "Each tensor that comes from a worker is one, and so is each file of a data set.",
                      "ulimit -n 65536")  # fmt: skip


@check()
def remote_data(here: Environment) -> Iterator[Finding]:
    """A data set, or the cache it is in, on a network file system."""
    places = {name: here.variables[name] for name in _CACHES if here.variables.get(name)}
    places |= {loader.name: folder for loader in here.program.loaders for folder in loader.folders}
    for name, path in places.items():
        kind, _ = here.mount(path)
        if kind in REMOTE:
            yield warning(f"{name} is on a network file system: {path} ({kind}).",
                          "Every small file is a round trip: workers wait, whatever their number.",
                          f"cp -r {path} /local/disk  # or pack it into few large files")  # fmt: skip


@check()
def crowded_workers(here: Environment) -> Iterator[Finding]:
    """More workers than cores, all ranks counted."""
    ranks = max(1, here.number("LOCAL_WORLD_SIZE") or 1)
    for loader in here.program.loaders:
        if loader.workers * ranks > here.granted:
            times = f" in each of {ranks} ranks" if ranks > 1 else ""
            yield warning(f"{loader.name} has {count_text(loader.workers, 'worker')}{times}, "
                          f"and this process is granted {count_text(here.granted, 'core')}.",
                          "They take the cores from one another and from the loop.",
                          "fettle data TARGET  # measures how many are worth it")  # fmt: skip


@check()
def fork_after_cuda(here: Environment) -> Iterator[Finding]:
    """Workers that are forked from a process with a CUDA context."""
    for loader in here.program.loaders:
        if here.program.used_cuda and loader.workers and loader.start_method == "fork":
            yield note(f"CUDA was in use before {loader.name} forks {count_text(loader.workers, 'worker')}.",
                       "That works unless a worker touches CUDA: 'Cannot re-initialize CUDA in forked subprocess'.",
                       "DataLoader(..., multiprocessing_context='forkserver')  # where one does")  # fmt: skip


@check()
def large_lists(here: Environment) -> Iterator[Finding]:
    """Python objects in a data set, which every worker copies by and by."""
    for loader in here.program.loaders:
        for name, length in loader.lists if loader.workers else ():
            workers = count_text(loader.workers, "worker")
            yield warning(f"{loader.name}.{name} holds {length:,} Python objects, for {workers}.",
                          "Reading an object writes its reference count: each worker copies the list page by page.",
                          f"self.{name} = numpy.array(self.{name})  # or a torch tensor")  # fmt: skip


@check()
def shared_by_files(here: Environment) -> Iterator[Finding]:
    """Sharing by names in /dev/shm, which a killed process leaves behind."""
    if here.program.sharing == "file_system":
        yield note("Tensors are shared by file_system.", "A process that is killed leaves its tensors in /dev/shm.",
                   "torch.multiprocessing.set_sharing_strategy('file_descriptor')  # with ulimit -n 65536")  # fmt: skip
