// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command fence measures what the fence adds to the time to bind a pod, on a real API server and with real scheduler
// processes (make bench-fence).
//
// Two schedulers, one with the fence and one without, take turns on one pool: whatever the machine does meanwhile
// concerns both. A pod's time runs from the request that creates it until its watch says that it is bound. The wait
// is what the fence itself reports. Half of the GPUs are held from the beginning.
package main
