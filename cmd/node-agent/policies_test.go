// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"stowage.dev/stowage/pkg/policies"
)

// An agent that serves already ends when a policy turns out to be void.
func TestAnAgentThatServesEndsWhenAPolicyIsVoid(t *testing.T) {
	for name, tc := range map[string]struct {
		later func(resource string) error
		void  bool
	}{
		"void": {later: func(string) error { return nil }, void: true},
		"refused": {later: func(resource string) error {
			policy := map[string]string{"resourceslices": "slices", "nodes": "node", "events": "events"}[resource]
			return apierrors.NewForbidden(schema.GroupResource{}, "", fmt.Errorf("ValidatingAdmissionPolicy 'stowage-node-agent-own-%s' denied request: no", policy))
		}},
		"not known": {later: func(string) error { return apierrors.NewForbidden(schema.GroupResource{}, "", errors.New("no role")) }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begin := time.Now()
				client := fake.NewSimpleClientset()
				client.PrependReactor("*", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
					if time.Since(begin) < time.Hour {
						return true, nil, errors.New("away")
					}
					return true, nil, tc.later(action.GetResource().Resource)
				})
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Hour)
				defer cancel()
				var started, ended time.Duration
				err := runUnderPolicies(ctx, client, "node-1", func(ctx context.Context) error {
					started = time.Since(begin)
					<-ctx.Done()
					ended = time.Since(begin)
					return nil
				})
				var void *policies.VoidError
				if errors.As(err, &void) != tc.void || !tc.void && err != nil {
					t.Errorf("ended with %v", err)
				}
				if started > time.Minute || (ended < 2*time.Hour) != tc.void {
					t.Errorf("started after %v, ended after %v", started, ended)
				}
			})
		})
	}
}
