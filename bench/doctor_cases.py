"""Does `fettle doctor` find what is wrong? Faults planted one by one in made-up machines, and healthy ones.

    python bench/doctor_cases.py --json bench/results/doctor_cases.json

Shown: each planted fault is said by the check it belongs to, at its level and with the words that matter, and by no
other check; nothing at all is said of the healthy machines; no error of the machine this runs on; and no package that
is looked at is imported. Nothing is timed. Exit code 1 where any of this is not so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from fettle.doctor import CHECKS, examine  # noqa: E402
from tests.doctor.planted import CASES, CLEAN  # noqa: E402

_HERE = """
import json, sys

class Seen:
    names = set()
    def find_spec(self, name, path=None, target=None):
        self.names.add(name.partition(".")[0])

sys.meta_path.insert(0, Seen())
from importlib import metadata
from fettle.doctor import examine, this_environment
found = examine(this_environment())
tops = {}
for one in metadata.distributions():
    for name in (one.read_text("top_level.txt") or one.metadata["Name"].replace("-", "_")).split():
        tops[name] = one.metadata["Name"].lower()
needed = {"torch-fettle", "msgspec", "packaging", "psutil", "nvidia-ml-py", "typing_extensions"}  # what fettle runs on
imported = sorted({tops[name] for name in Seen.names if name in tops} - needed)
print(json.dumps({"findings": [[item.check, item.level] for item in found], "imported": imported,
                  "distributions": len(set(tops.values()))}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the result is written")
    given = parser.parse_args()
    faults = {case.name: fault for case in CASES if (fault := case.fault(examine(case.here)))}
    false = {name: [item.check for item in examine(here)] for name, here in CLEAN.items()}
    done = subprocess.run([sys.executable, "-c", _HERE], capture_output=True, text=True, check=True, cwd=ROOT)
    here = json.loads(done.stdout)
    result = {
        "planted": len(CASES),
        "found": len(CASES) - len(faults),
        "not found": faults,
        "by level": dict(Counter(case.level for case in CASES)),
        "checks": len(CHECKS),
        "checks with a case": len({case.check for case in CASES}),
        "healthy machines": false,
        "this machine": here,
        "cases": [[case.name, case.check, case.level] for case in CASES],
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['found']} of {result['planted']} planted faults found; false: {sum(map(len, false.values()))}; "
          f"here: {here['findings'] or 'nothing'}; imported: {here['imported'] or 'none'}")  # fmt: skip
    for name, fault in faults.items():
        print(f"{name}: {fault}")
    errors = [check for check, level in here["findings"] if level == "error"]
    sys.exit(bool(faults or any(false.values()) or errors or here["imported"] or len(CASES) < 80))


if __name__ == "__main__":
    main()
