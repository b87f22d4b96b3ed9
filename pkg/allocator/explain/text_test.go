// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// At most three claims are named, and of those of other namespaces only the number is told.
func TestListClaims(t *testing.T) {
	for _, tc := range []struct {
		names   []string
		foreign int
		want    string
	}{
		{[]string{"t/a"}, 0, "claim t/a"},
		{[]string{"t/a", "t/b", "t/c"}, 0, "claims t/a, t/b, t/c"},
		{[]string{"t/a", "t/b", "t/c", "t/d"}, 0, "claims t/a, t/b, t/c and 1 more"},
		{[]string{"t/a", "t/b", "t/c", "t/d", "t/e"}, 2, "claims t/a, t/b, t/c and 2 more and 2 claims of other namespaces"},
		{nil, 1, "1 claim of other namespaces"},
	} {
		if diff := cmp.Diff(tc.want, ListClaims(tc.names, tc.foreign)); diff != "" {
			t.Error(diff)
		}
	}
}
