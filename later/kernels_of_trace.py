import gzip, json, sys, collections

d = json.load(gzip.open(sys.argv[1]))
ev = [
    e
    for e in d["traceEvents"]
    if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and e["args"]["stream"] == 7
]
ev.sort(key=lambda e: e["ts"])
t0 = ev[0]["ts"]
c = collections.Counter()
n = collections.Counter()
for e in ev:
    c[e["name"][:150]] += e["dur"]
    n[e["name"][:150]] += 1
for k, v in c.most_common(40):
    print("%8.2f ms %5d  %s" % (v / 1e3, n[k], k))
print("--- the step")
last = None
for e in ev:
    t = (e["ts"] - t0) / 1e3
    if t > 385:
        gap = (e["ts"] - last) / 1e3 if last else 0
        if gap > 0.3 or e["dur"] > 300:
            print("%8.2f gap %.2f dur %.3f %s" % (t, gap, e["dur"] / 1e3, e["name"][:100]))
    last = e["ts"] + e["dur"]
