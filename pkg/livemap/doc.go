// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package livemap is the page of "kubectl stowage map" and what serves it: the GPUs of a cluster by node, the pods that wait, and how both
// were during the last hour. [Cluster] joins objects pool by pool, [History] keeps what they were, [Server] hands both to browsers. The
// page is below web; its build is committed and embedded.
package livemap
