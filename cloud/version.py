"""The installed version, asked once."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("isthmus")
except PackageNotFoundError:  # run from a checkout that was never installed
    VERSION = "0+unknown"
