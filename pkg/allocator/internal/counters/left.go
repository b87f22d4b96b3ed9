// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package counters

import (
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
)

// Affords tells whether so much is left.
func Affords(left []amount.Amount, uses []inventory.Use) bool {
	for i := range uses {
		if left[uses[i].Counter].Less(uses[i].Amount) {
			return false
		}
	}
	return true
}

// Covers tells whether what is left of each capacity is enough.
func Covers(left, takes []amount.Amount) bool {
	for i := range takes {
		if left[i].Less(takes[i]) {
			return false
		}
	}
	return true
}
