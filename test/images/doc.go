// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package images checks how the images that the manifests name are built, with a builder that only writes down what it is asked for.
package images
