// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command nvmlsim-library is the simulated NVML as a shared library: built with
// -buildmode=c-shared it is a libnvidia-ml.so.1 (make nvml-library). As a program
// it does nothing.
package main

import _ "stowage.dev/stowage/pkg/nvmlsim/capi"

func main() {}
