// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package audit finds what must not be in the account of who holds what: a device that two claims hold, an account that
// differs from the API, an allocation in flight that nobody is about to write.
//
// None of that can happen by the design of pkg/tracker and the writes of pkg/plugins/deviceclaims, and other schedulers,
// users with the rights to write claims, and mistakes can make all of it happen. So it is looked for.
//
// The functions are pure: they are given views, lists and the time. Who gives them, and tells of what was found, is
// pkg/plugins/deviceclaims.
package audit
