# DeepSpeed 0.19.8: no universal checkpoint can be made of a Muon checkpoint. Start with deepspeed.
import sys
import tempfile

import torch

import deepspeed
from deepspeed.checkpoint import ds_to_universal

model = torch.nn.Linear(4, 4)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Muon", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
}
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
folder = tempfile.mkdtemp()
engine.save_checkpoint(folder, tag="saved")
sys.argv = ["", "--input_folder", f"{folder}/saved", "--output_folder", f"{folder}/made", "--inject_missing_state"]
ds_to_universal.main(ds_to_universal.parse_arguments())  # KeyError: 'exp_avg'
