cd /work/wt/more; export PYTHONPATH=build/editable:. ; unset PYTHONSAFEPATH; export HF_HUB_OFFLINE=1
python -m benchmarks.fits --sizes > /tmp/exp/sizes.txt 2>/dev/null
F="python -m deepspeed.compile.fits --gpus 8 --memory 80"
C=/tmp/exp/cfg
for a in "" "--micro-batch 2" "--accumulation 4"; do $F --model $C/Qwen3-8B --sequence 4096 --all $a; done > /tmp/exp/f8b.txt 2>/dev/null
$F --model $C/Qwen3-1.7B --sequence 4096 --micro-batch 8 --all > /tmp/exp/f17.txt 2>/dev/null
$F --model $C/Qwen3-32B > /tmp/exp/f32.txt 2>/dev/null
for a in "" "--inputs-on-host"; do $F --model $C/Qwen3-8B --sequence 32768 --all $a; done > /tmp/exp/flong.txt 2>/dev/null
for s in 32768 65536 131072 262144; do for a in "" "--loss-tiles $((s/1024))" "--loss-tiles $((s/1024)) --mlp-tiles $((s/4096))"; do echo "== $s $a"; python -m deepspeed.compile.fits --gpus 1 --memory 141 --model $C/Qwen3-8B --sequence $s --inputs-on-host --all $a 2>/dev/null| grep -E "remainders, 8-bit|host"; done; done > /tmp/exp/flong1.txt 2>&1
python - <<'P' 2>/dev/null
from transformers import Qwen3MoeConfig
Qwen3MoeConfig(vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=40960, tie_word_embeddings=False, decoder_sparse_step=1, rope_theta=1e6, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16").save_pretrained("/tmp/exp/cfg/moe")
P
$F --model $C/moe --sequence 4096 --all > /tmp/exp/fmoe.txt 2>/dev/null
echo done > /tmp/exp/regen.done
