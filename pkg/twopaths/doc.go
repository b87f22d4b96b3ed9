// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package twopaths is what the node agent and the scheduler agree upon about GPUs that the kubelet gives to pods by the device
// plugin API, beside those of the node's ResourceSlices. The agent knows which GPUs device plugins have, some seconds after the
// kubelet does. The scheduler knows at once how many devices they have and which pods ask for some. [Listed], which is on each
// device of the slices, tells the scheduler how much of that the agent has seen.
package twopaths
