import sys, importlib.util, pathlib

tree = pathlib.Path(sys.argv[1])
spec = importlib.util.spec_from_file_location("fork_setup", tree / "setup.py")
m = importlib.util.module_from_spec(spec)
sys.argv = ["setup.py"]
spec.loader.exec_module(m)
version, sha = m.read_pin()
archive = m.fetch_base(version, sha)
m.compose(archive, version, tree / "build" / "editable", link=True)
print("composed", tree)
