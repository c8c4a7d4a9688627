"""`python -m longstraw_sdk.cli`, the same as `longstraw`."""

from . import main

main()
