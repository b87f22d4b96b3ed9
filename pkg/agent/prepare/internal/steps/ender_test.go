// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"errors"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/sharing"
)

// podOf is what is known of one process.
type podOf struct {
	sharing.Processes
	pod types.UID
	err error
}

func (p podOf) PodOf(uint32) (types.UID, error) { return p.pod, p.err }

func TestAProcessOfTheHostIsNoPods(t *testing.T) {
	unknown := errors.New("unknown")
	for name, test := range map[string]struct {
		process podOf
		pods    []types.UID
		is      bool
		err     error
	}{
		"one of the pods":                        {process: podOf{pod: "a"}, pods: []types.UID{"b", "a"}, is: true},
		"another pod":                            {process: podOf{pod: "c"}, pods: []types.UID{"b", "a"}},
		"the host, and a pod without a UID":      {pods: []types.UID{"a", ""}},
		"it cannot be told, a pod without a UID": {process: podOf{err: unknown}, pods: []types.UID{""}, err: unknown},
		"it has ended, and a pod without a UID":  {process: podOf{err: sharing.ErrNoProcess}, pods: []types.UID{""}},
	} {
		t.Run(name, func(t *testing.T) {
			if _, is, err := (Ender{Tool: test.process}).isOf(1, test.pods); is != test.is || !errors.Is(err, test.err) {
				t.Errorf("%t, %v; want %t, %v", is, err, test.is, test.err)
			}
		})
	}
}
