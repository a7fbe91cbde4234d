"""A process that tries classes of one library: names come in, a line of JSON for each goes out.

Libraries print what they like, so that answers have a descriptor of their own.
"""

import importlib
import json
import os
import sys
import time
import warnings

from benchmarks.roles.compare import first_that_runs


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    library = importlib.import_module(sys.argv[1])
    families = library.families()
    print(json.dumps({"families": families}), file=answers, flush=True)
    for line in sys.stdin:
        name = line.strip()
        start = time.perf_counter()
        try:
            found = first_that_runs(library.attempts(name))
        except Exception as error:  # the library's own: a class that cannot even be looked at
            found = {"errors": [{"attempt": "", "stage": "look", "error": f"{type(error).__name__}: {error}"[:300]}]}
        found |= {"class": name, "family": families[name], "all_seconds": time.perf_counter() - start}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
