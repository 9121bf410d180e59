import mmap
import os

import pytest

from notebook_accel.system.segment import attach, seal


@pytest.fixture
def parts():
    return tuple(memoryview(bytes([number]) * size) for number, size in enumerate((100, 0, 3, 64)))


def test_nobody_can_change_a_sealed_segment(parts):
    fd = seal(parts)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 64, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE)
    os.close(fd)


def test_what_could_shrink_or_is_too_short_is_not_mapped(parts):
    open_segment = os.memfd_create("open")
    os.ftruncate(open_segment, 64)
    with pytest.raises(ValueError, match="no sealed"):
        attach(open_segment, [10])
    os.close(open_segment)
    fd = seal(parts)
    with pytest.raises(ValueError, match="its buffers need 1024"):
        attach(fd, [1000])
    os.close(fd)
