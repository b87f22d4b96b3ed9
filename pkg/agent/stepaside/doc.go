// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package stepaside decides whether the agent may have the NVIDIA driver open.
//
// There are two reasons why not. Somebody wants the driver for himself, to
// reset a GPU, to unload or to upgrade the driver: a command on the node, an
// annotation of the Node, or the GPU operator's labels say so. Or the driver's
// library is not any more what this process has loaded, and the dynamic loader
// never loads another one.
//
// In both cases the agent steps aside: nothing new begins, what is under way
// comes to its end, all is closed. It comes back as a new process, once nobody
// wants the driver for himself and another process was able to open it.
//
// The package knows neither NVML nor what is done with the driver.
package stepaside
