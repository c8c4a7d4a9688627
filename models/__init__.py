"""One folder per architecture, imported as `longstraw_sdk.models.<arch>`; `models/README.md` is their contract."""

if __name__ != "longstraw_sdk.models":
    raise ImportError(
        f"this folder was imported as {__name__!r}; it is packaged as longstraw_sdk.models: "
        "write `import longstraw_sdk.models` (or `from longstraw_sdk.models.<arch> import ...`)"
    )
