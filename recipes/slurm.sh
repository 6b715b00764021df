#!/bin/bash
# Train on several nodes under SLURM: one torchrun per node, one process per GPU.
#
#     sbatch --nodes 4 recipes/slurm.sh recipes/qwen2.5-vl-7b-fsdp.toml [--set key=value]...
#
# Five minutes before its time limit the run gets SIGTERM: it finishes the step, saves its state and stops; the job is
# requeued and resumes. If a process dies or hangs, torchrun restarts all of them, up to three times.
#SBATCH --job-name=saccade
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@300
#SBATCH --open-mode=append

set -euo pipefail
export OMP_NUM_THREADS=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240 # seconds to save in; torch before 2.12 gives 30, whatever this says
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

was_asked=no
trap 'was_asked=yes; scancel --signal=TERM "$SLURM_JOB_ID"' TERM # to the job steps, not to this script

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --max-restarts 3 \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$first:29500" \
    -m saccade train "$@" &

status=0
wait $! || status=$?
if [ "$was_asked" = yes ]; then
    wait || true # a signal ends the first wait before the run has ended
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
