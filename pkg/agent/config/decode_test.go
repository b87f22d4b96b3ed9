// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/config/configtest"
)

// What is right is read, and of what is not the field, the value and what is wanted are told. The admission policy is tested with the same
// table (test/integration).
func TestDecode(t *testing.T) {
	for name, tc := range configtest.Cases {
		t.Run(name, func(t *testing.T) {
			kind, settings, err := config.Decode([]byte(tc.Raw))
			if tc.Refused == nil {
				if err != nil {
					t.Fatal(err)
				}
				if kind != tc.Kind {
					t.Errorf("kind %s, want %s", kind, tc.Kind)
				}
				if diff := cmp.Diff(tc.Settings, settings); diff != "" {
					t.Errorf("settings (-want +got):\n%s", diff)
				}
				return
			}
			if err == nil {
				t.Fatalf("accepted as %s, %+v", kind, settings)
			}
			if tc.Text != "" && err.Error() != tc.Text {
				t.Errorf("error %q, want %q", err, tc.Text)
			}
			for _, want := range tc.Refused {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
		})
	}
}
