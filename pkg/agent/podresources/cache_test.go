// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"
)

func TestAnAnswerIsKeptForAWhile(t *testing.T) {
	type outcome struct {
		pods int
		age  time.Duration
		err  bool
	}
	away := errors.New("away")
	for name, steps := range map[string][]struct {
		after time.Duration
		pods  []Pod
		err   error
		want  outcome
	}{
		"away from the beginning": {{err: away, want: outcome{err: true}}},
		"away for some time": {
			{pods: make([]Pod, 2), want: outcome{pods: 2}},
			{after: time.Minute, err: away, want: outcome{pods: 2, age: time.Minute, err: true}},
			{after: Keep - time.Minute, err: away, want: outcome{pods: 2, age: Keep, err: true}},
			{after: time.Second, err: away, want: outcome{age: Keep + time.Second, err: true}},
			{after: time.Second, pods: make([]Pod, 1), want: outcome{pods: 1}},
		},
		"pods that are gone": {
			{pods: make([]Pod, 2), want: outcome{pods: 2}},
			{after: time.Second, pods: make([]Pod, 1), want: outcome{pods: 1}},
		},
		"no pods at all, as after a start": {
			{want: outcome{}},
			{pods: make([]Pod, 2), want: outcome{pods: 2}},
			{after: time.Minute, want: outcome{pods: 2, age: time.Minute, err: true}},
			{after: time.Minute, pods: make([]Pod, 2), want: outcome{pods: 2}},
		},
		"no pods any more": {
			{pods: make([]Pod, 2), want: outcome{pods: 2}},
			{after: Keep + time.Second, want: outcome{}},
			{after: time.Second, want: outcome{}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var pods []Pod
				var err error
				cache := NewCache(func(context.Context) ([]Pod, error) { return pods, err }, clock.RealClock{})
				for i, step := range steps {
					time.Sleep(step.after) // of the bubble
					pods, err = step.pods, step.err
					got, age, told := cache.Pods(t.Context())
					if is := (outcome{len(got), age, told != nil}); is != step.want {
						t.Errorf("step %d: %+v, want %+v", i, is, step.want)
					}
				}
			})
		})
	}
}
