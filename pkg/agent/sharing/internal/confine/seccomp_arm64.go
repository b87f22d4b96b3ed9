// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package confine

import "golang.org/x/sys/unix"

const architecture = unix.AUDIT_ARCH_AARCH64

// firstForeign is the first number of a call by another ABI, of which there are none.
const firstForeign = 0xffffffff
