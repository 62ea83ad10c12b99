import subprocess,sys,os
repo="/work/.mirror/deepspeedai+DeepSpeed/repo"; c="edaa72212"; dst="/tmp/ck/ds"
ls=subprocess.run(["git","-C",repo,"ls-tree","-r",c,"tests"],capture_output=True,text=True).stdout.splitlines()
miss=[]
for l in ls:
    meta,path=l.split("\t"); sha=meta.split()[2]
    r=subprocess.run(["git","-C",repo,"cat-file","blob",sha],capture_output=True)
    if r.returncode: miss.append(path); continue
    p=os.path.join(dst,path); os.makedirs(os.path.dirname(p),exist_ok=True); open(p,"wb").write(r.stdout)
print(len(ls),miss[:50],len(miss))
