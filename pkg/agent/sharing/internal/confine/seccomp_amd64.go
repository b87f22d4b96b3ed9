// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package confine

import "golang.org/x/sys/unix"

const architecture = unix.AUDIT_ARCH_X86_64

// firstForeign is the first number of a call by another ABI: x32.
const firstForeign = 0x40000000
