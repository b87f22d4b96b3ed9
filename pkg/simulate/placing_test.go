// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// However many pods share claims, they are placed on one copy of the cluster: to make another one takes longer than to place them.
func TestPodsThatShareClaimsArePlacedOnOneCopy(t *testing.T) {
	c := snapshottest.New(8, 8)
	for i, version := range []string{"", "x", "0", "7", "18446744073709551615"} {
		pod, claim := c.Pod("a", fmt.Sprintf("one-%d", i), 1, 0)
		claim.ResourceVersion = version
		other := pod.DeepCopy()
		other.Name += "-other"
		other.UID = types.UID(other.Name)
		c.Pods = append(c.Pods, other)
	}
	p, err := newPlacing(t.Context(), NewChange(&c.Objects), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	cluster := p.cluster
	for _, pod := range c.Pods {
		if out, err := p.schedule(t.Context(), pod); err != nil || out.Node == "" {
			t.Errorf("pod %s: %+v, error %v", pod.Name, out, err)
		}
	}
	if p.cluster != cluster {
		t.Error("the cluster was copied again")
	}
}
