// Package gpu holds the checks that only a real GPU can answer: whether NVML behaves as the node agent takes it to. docs/simulation.md
// says what simulated GPUs cannot prove.
//
// Each check but that of MPS, which needs systemd, also runs on simulated GPUs, with every test run: so a machine with a GPU, which few have, finds checks that work.
package gpu
