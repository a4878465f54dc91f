"""`longspan` with FSDP on CPUs: torch has it, accelerate offers it on accelerators alone."""

import os
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

KNOWN = "                DistributedType.MULTI_GPU,\n                DistributedType.MULTI_MLU,\n"


class Changed(SourceFileLoader):
    def get_code(self, fullname):
        source = Path(self.path).read_text()
        assert source.count(KNOWN) == 1, "accelerate has changed where it takes FSDP into account"
        added = f"{KNOWN}                DistributedType.MULTI_CPU,\n"
        return compile(source.replace(KNOWN, added), self.path, "exec")


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        spec = super().find_spec(fullname, path, target) if fullname == "accelerate.state" else None
        if spec is not None:
            spec.loader = Changed(fullname, spec.origin)
        return spec


if __name__ == "__main__":
    sys.meta_path.insert(0, Finder)
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }
    from longspan.cli import main

    try:
        main()
    except SystemExit as end:
        # Shards hold on to their group, whose threads then outlive the interpreter: one that lets
        # go of its last tensor while Python ends would abort the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code or 0)
