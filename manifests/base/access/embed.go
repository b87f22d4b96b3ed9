// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package access has the shipped roles and admission policies, so that kubectl stowage can compare a cluster with them.
package access

import "embed"

// Files are the manifests of this folder.
//
//go:embed *.yaml
var Files embed.FS
