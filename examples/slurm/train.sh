#!/bin/bash
# Towers on two nodes: sbatch train.sh
#
# It continues from its last checkpoint after a node has failed, and after the job's time
# is over.
#SBATCH --job-name=towers
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120

# Two minutes before the end of its time, the hosts save and end with 143.
trap 'over=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

export TOWERS_TOKEN=$(openssl rand -hex 16)
# Each task is a host. With mpi4py, --mpi=pmix lets MPI carry all bytes.
srun --kill-on-bad-exit=1 python -m towers.train \
    --model=resnet20 --dataset=tfds:cifar10 --model_dir=runs/cifar --save_every=10min &
wait $!
code=$?
if [ "$over" ]; then
    # The signal has ended the first wait.
    wait $!
    code=$?
    [ $code = 143 ] && scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
