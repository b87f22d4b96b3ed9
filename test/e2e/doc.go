// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package e2e tests Stowage end to end on a real node: API server, our
// scheduler, kubelet, containerd, runc and our node agent, with simulated GPUs.
// Its tests have the build tag e2e and need root; `make e2e` runs them.
package e2e
