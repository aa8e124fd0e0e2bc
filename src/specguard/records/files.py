"""Untrusted and own files: the only module that opens any.

Only regular files are read, up to a size that the caller states; pipes and devices are refused without waiting.
Files are written atomically and never through a link. Links in a folder that the user names are allowed; below it,
`folder_below` creates folders without following links, and `check_below` checks existing ones.
"""

import errno
import fcntl
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specguard.errors import RunError

_LONGEST_LINE = 64 * 2**20
_ALWAYS = os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe without a writer must not block
_DRAFT = re.compile(r"\.specguard-[0-9a-f]{16}\.draft")


# Reading ---------------------------------------------------------------------------------------------------------


@contextmanager
def reading(what: object, error: type[Exception] = RunError) -> Iterator[None]:
    """Turn errors of the file system into one sentence about `what`."""
    try:
        yield
    except FileNotFoundError:
        raise error(f"{what} does not exist") from None
    except OSError as cause:
        raise error(f"{what} cannot be read: {cause.strerror or cause}") from cause


def open_file(path: Path, most: int, *, links: bool = True) -> io.BufferedReader:
    """Open a regular file of at most `most` bytes for reading; anything else raises an OSError.

    Without `links`, the file itself may not be a link.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _ALWAYS | (0 if links else os.O_NOFOLLOW))
    except ValueError as error:  # a name with a null byte
        raise OSError(errno.EINVAL, str(error)) from error
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise OSError(errno.ELOOP, "it is a link, which is not followed") from error
        raise
    try:
        _check_regular(descriptor)
        _check_size(os.fstat(descriptor).st_size, most)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, most: int, *, links: bool = True) -> bytes:
    """The content of a regular file; an OSError where it cannot be read."""
    with open_file(path, most, links=links) as handle:
        size = os.fstat(handle.fileno()).st_size
        content = handle.read(size + 1)
    if len(content) > size:  # also files of the kernel, whose stated size is 0
        raise OSError(errno.EBUSY, "it has grown while it was read")
    return content


def file_lines(path: Path, most: int, *, links: bool = True, begin: int = 0) -> Iterator[bytes]:
    """The lines of a regular file from the byte `begin` on, one at a time, with their newlines.

    A last line that is incomplete has none.
    """
    with open_file(path, most, links=links) as handle:
        handle.seek(begin)
        while line := handle.readline(_LONGEST_LINE + 1):
            _check_size(len(line), _LONGEST_LINE, "one of its lines")
            yield line


def _check_regular(descriptor: int) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")


def _check_size(size: int, most: int, what: str = "it") -> None:
    if size > most:
        raise OSError(errno.EFBIG, f"{what} has more than {most:,} bytes, too many to be read")


# Writing ---------------------------------------------------------------------------------------------------------


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into one sentence that names `path`."""
    try:
        yield
    except OSError as error:
        reason = "it is a link, which is not followed" if error.errno == errno.ELOOP else error.strerror or error
        raise RunError(f"{path} cannot be written: {reason}") from error


def write_file(path: Path, content: bytes, *, replace: bool = True) -> None:
    """Write atomically: to a draft that is flushed to the disk and then renamed. A link is replaced.

    Without `replace`, a file or a link of that name is kept, and an error says that it exists.
    """
    if not path.name:
        raise RunError(f"{path} cannot be written: it is a folder")
    with writing(path):
        _remove_dead_drafts(path.parent)
        draft, descriptor = _new_draft(path.parent)
        try:
            with os.fdopen(descriptor, "wb") as handle:
                handle.write(content)
                handle.flush()
                os.fsync(handle.fileno())
                _rename(draft, path, replace)
        except BaseException:  # including KeyboardInterrupt
            draft.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def _rename(draft: Path, path: Path, replace: bool) -> None:
    if not replace:
        try:
            os.link(draft, path)  # unlike a rename, it never replaces a file
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            if os.path.lexists(path):  # a file system without hard links
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        else:
            os.unlink(draft)
            return
    os.replace(draft, path)


def append_file(path: Path, content: bytes) -> None:
    """Append to a file and flush it to the disk; links and files with several hard links are refused."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | _ALWAYS
    with writing(path), os.fdopen(os.open(path, flags, 0o666), "ab") as handle:
        _check_regular(handle.fileno())
        if os.fstat(handle.fileno()).st_nlink > 1:
            raise OSError(errno.EMLINK, "it has several hard links, and appending would change another file too")
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())


@contextmanager
def locked(run: Path, *below: str, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Create the run directory, or a folder `below` it, and lock it for this process.

    A second process is refused, or waits with `wait`; the lock of a process that died is released. Processes with a
    `shared` lock exclude only those without.
    """
    folder = folder_below(run, *below)
    with writing(folder / ".lock"):
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | _ALWAYS, 0o666)
    try:
        with writing(folder / ".lock"):
            _check_regular(descriptor)
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"the run directory {folder} is in use by another process") from None
        _remove_dead_drafts(folder)
        yield
    finally:
        os.close(descriptor)


def folder_below(run: Path, *names: str) -> Path:
    """The folder of these names below `run`, created where it is missing; links among them are refused."""
    folder = run
    with writing(run.joinpath(*names)):
        run.mkdir(parents=True, exist_ok=True)
        above = os.open(run, os.O_RDONLY | os.O_DIRECTORY | _ALWAYS)
        try:
            for name in names:
                folder /= name
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=above)
                try:
                    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | _ALWAYS, dir_fd=above)
                except OSError as error:
                    if error.errno in (errno.ENOTDIR, errno.ELOOP):
                        raise _not_a_folder(folder) from None
                    raise
                os.close(above)
                above = inner
        finally:
            os.close(above)
    return folder


def check_below(run: Path, folder: Path) -> Path:
    """`folder`, whose existing parts below `run` must be folders and not links."""
    for path in (*reversed(folder.relative_to(run).parents), folder.relative_to(run))[1:]:
        with suppress(OSError, ValueError):  # parts that cannot be read fail when they are written
            if not stat.S_ISDIR(os.lstat(run / path).st_mode):
                raise _not_a_folder(run / path)
    return folder


def checks_beside(run: Path) -> Path | None:
    """The folder of the checks of a run's certificates: beside the run, which no check writes to.

    None where there is no such place: beside the root of all folders, or where another run has that name.
    """
    run = run.resolve()
    if not run.name:
        return None
    place = run.with_name(f"{run.name}.checks")
    return None if any(os.path.lexists(place / name) for name in ("run.json", "result.json")) else place


def _not_a_folder(path: Path) -> RunError:
    return RunError(f"{path} is a link or not a folder, and nothing is written through it")


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _new_draft(folder: Path) -> tuple[Path, int]:
    """A new file, open and locked: a draft without a lock is left over from a process that was killed."""
    while True:
        draft = folder / f".specguard-{secrets.token_hex(8)}.draft"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | _ALWAYS, 0o666)
        with suppress(OSError):  # on a file system without locks, drafts are never removed
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return draft, descriptor
        os.close(descriptor)  # removed by another process before it was locked


def _remove_dead_drafts(folder: Path) -> None:
    for name in filter(_DRAFT.fullmatch, os.listdir(folder)):
        with suppress(OSError):  # not a file, locked, or removed by another process
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | _ALWAYS)
            try:
                _check_regular(descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(folder / name)
            finally:
                os.close(descriptor)
