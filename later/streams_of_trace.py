import gzip, json, sys, collections

d = json.load(gzip.open(sys.argv[1]))
ev = [e for e in d["traceEvents"] if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
t0 = min(e["ts"] for e in ev)
by = collections.defaultdict(list)
for e in ev:
    by[e["args"]["stream"]].append(e)
for s, l in sorted(by.items()):
    l.sort(key=lambda e: e["ts"])
    c = collections.Counter()
    n = collections.Counter()
    for e in l:
        c[e["name"][:60]] += e["dur"]
        n[e["name"][:60]] += 1
    print(
        "stream",
        s,
        len(l),
        "busy %.1f ms" % (sum(c.values()) / 1e3),
        "from %.1f to %.1f" % ((l[0]["ts"] - t0) / 1e3, (l[-1]["ts"] - t0) / 1e3),
    )
    for k, v in c.most_common(6):
        print("     %8.1f ms %5d  %s" % (v / 1e3, n[k], k))
