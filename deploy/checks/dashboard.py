"""Whether a Grafana dashboard is one: unique ids, panels that do not overlap, each query of the data source's variable, every
variable that is used defined. Prints the queries as recording rules, for promtool to parse.

dashboard.py DASHBOARD RULES
"""

import json
import re
import sys
from pathlib import Path

dashboard = json.loads(Path(sys.argv[1]).read_text())
faults = []

panels = dashboard["panels"]
ids = [panel["id"] for panel in panels]
if len(ids) != len(set(ids)):
    faults.append("panels share an id")
cells = {}
for panel in panels:
    at = panel["gridPos"]
    if at["x"] + at["w"] > 24:
        faults.append(f"{panel['title']} is wider than the page")
    for x in range(at["x"], at["x"] + at["w"]):
        for y in range(at["y"], at["y"] + at["h"]):
            if cells.setdefault((x, y), panel["title"]) != panel["title"]:
                faults.append(f"{panel['title']} overlaps {cells[x, y]}")

defined = {variable["name"] for variable in dashboard["templating"]["list"]}
rules = []
for panel in panels:
    if panel["type"] == "row":
        continue
    if not panel["targets"]:
        faults.append(f"{panel['title']} asks nothing")
    for target in panel["targets"]:
        if target["datasource"]["uid"] != "${datasource}":
            faults.append(f"{panel['title']} names a data source of its own")
        rules.append(target["expr"])
rules += [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
for used in re.findall(r"\$\{?(\w+)", json.dumps(dashboard)):
    if used not in defined and not used.startswith("__"):
        faults.append(f"variable {used} is not defined")

# JSON is YAML. Grafana's own variable stands for a time.
queries = [
    {"record": f"query:{number}", "expr": expr.replace("$__rate_interval", "1m")} for number, expr in enumerate(rules)
]
Path(sys.argv[2]).write_text(json.dumps({"groups": [{"name": "dashboard", "rules": queries}]}))
print(f"{len(panels)} panels, {len(queries)} queries")
sys.exit("\n".join(sorted(set(faults))) or None)
