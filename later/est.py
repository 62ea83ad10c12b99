import sys, torch
from benchmarks.workload import build_model, Shape
from deepspeed.compile.tools.fits import estimate
from deepspeed.compile.tools.fits.modes import Mode, Question
LAYERS, SEQ, MT, LT = 3, 8192, int(sys.argv[1]), int(sys.argv[2])
shape = Shape(LAYERS, 256, 768, 4, 2, 64, 2048, tie_word_embeddings=False)
q = Question(sequence=SEQ, dtype=torch.float32, gpus=1, micro_batch=1, accumulation=1, copy_engines=False, mlp_tiles=MT or None, loss_tiles=LT or None)
s = estimate.Subject(lambda: build_model(shape, torch.float32, "meta", checkpoint=False), q, lambda x: None)
r = estimate.row_of(s, Mode("x", checkpoint=True), q)
M=2**20
print("estimate MiB", {p: round(getattr(r,p)/M,2) for p in ("at_rest","forward","backward","step","peak")}, s.untraceable)
a = s.activations(Mode("x", checkpoint=True), q)
base=0
for m in a.backward: print(round(m.most/M,2), round(m.after/M,2), m.gradient, getattr(m,"name",None) or "")
