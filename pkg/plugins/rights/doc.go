// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package rights tells which rights a scheduler with the plugins of this module lacks in the cluster, so that its
// readiness can say so. It asks the API server as the scheduler itself, by self subject reviews, which every user may make.
package rights
