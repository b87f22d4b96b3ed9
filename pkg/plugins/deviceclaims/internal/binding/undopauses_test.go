// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package binding

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"
)

// Who meets conflicts only tries again at once, for some time.
func TestUndoPausesAfterSomeConflicts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &Binder{Clock: clock.RealClock{}, UndoPauses: wait.Backoff{Duration: time.Second, Factor: 1, Steps: 10}}
		begun, tries := time.Now(), []time.Duration{}
		err := b.Persist(t.Context(), func() bool { return false }, func(context.Context) error {
			if tries = append(tries, time.Since(begun)); len(tries) <= undoConflicts {
				return apierrors.NewConflict(resourceapi.Resource("resourceclaims"), "c", errors.New("outdated"))
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff([]time.Duration{0, 0, 0, 0, 0, time.Second}, tries); diff != "" {
			t.Errorf("tries (-want +got):\n%s", diff)
		}
	})
}
