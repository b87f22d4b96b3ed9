// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compat_test

import (
	// Upstream's cases, which TestUpstreamsOwnCasesPass compiles, import it. Naming it here keeps it in go.mod, and so in
	// the module cache of whoever runs the tests without a network.
	_ "github.com/onsi/gomega"
)
