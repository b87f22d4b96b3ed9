// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package image makes the container images of the local cluster without a registry: it compiles the probe (folder probe) into
// a static binary and packs that into one archive with two tags, the probe itself and the pod sandbox ("pause"). A node
// imports the archive into its own containerd.
//
// It is not a general image builder: one layer, one platform (the machine's own), no base image.
package image
