"""What some tests need of the machine."""

import pytest

from tracformer import native

needs_compiler = pytest.mark.skipif(not native.available(), reason="no native code on this machine")
