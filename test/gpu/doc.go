// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gpu holds the checks that only a real GPU can answer: whether NVML, CUDA, the container runtime's hooks and MPS behave as the
// node agent takes them to. docs/simulation.md says what simulated GPUs cannot prove, and what was seen on real ones.
//
// The checks of NVML also run on simulated GPUs, with every test run, so a machine with a GPU, which few have, finds checks
// that work. Those of programs on the GPU (cuda_test.go, containers_test.go, mpsclients_test.go, mps_test.go) need a real
// one, and each says which program it lacks.
package gpu
