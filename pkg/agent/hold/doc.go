// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hold lets the rest of the agent treat a device that a pod got through the kubelet's device plugin API as it
// treats a claim: one ledger, one way to prepare, one proof that it is not used any more.
//
// The kubelet gives no pod with a device, and never says that a pod has ended. So there is a [Claim] for each device
// that was ever asked for, with a UID that follows from the device: asked for again, it is the same. What the API server
// says of real claims, the kubelet's device manager says of these: [Source] is the claim with the pods that have the
// device by the kubelet's [Checkpoint], and no claim where no pod has it.
package hold
