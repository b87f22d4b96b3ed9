// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package health decides which GPUs of a node are well.
//
// [State] is the decision: a pure state machine for one GPU that is fed with what NVML says (readings, events, errors, silence) and with
// the time, and that keeps [Fault]s, set and cleared with a delay of their own each. [Monitor] is the edge: one worker for each GPU that
// asks and listens, with a deadline, so that a call into NVML that does not return costs its GPU its health and nobody else anything.
//
// What follows from a fault (a taint, a report to the kubelet, an event) is decided elsewhere, from a [Verdict].
package health
