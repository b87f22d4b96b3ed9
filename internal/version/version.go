// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package version is the project's own version, beside that of Kubernetes in
// k8s.io/component-base/version. Clients of kube-scheduler parse the latter, so
// it stays what it is.
package version

import "k8s.io/component-base/version"

// release is set by the Makefile's LDFLAGS, from the newest tag.
var release = "v0.0.0-unknown"

// Release is the version of Stowage, such as v0.1.0, or v0.1.0-3-g1f2e3d4 three
// commits after it.
func Release() string { return release }

// Beside is that version in a line of its own, after a line that ends with Kubernetes'.
func Beside() string { return version.Get().GitVersion + "\nStowage " + release }
