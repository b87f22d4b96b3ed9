// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package exporter serves what the GPUs of a node do, and for whom, as Prometheus metrics: docs/metrics.md.
//
// A scrape starts readings of GPUs and questions to the kubelet, unless there were some within the interval, and waits for
// them a bounded time. What hangs holds one goroutine for each GPU, and the scrape goes on without it. While nobody scrapes
// nothing is read, except after an XID, which is counted for who has the device then.
package exporter
