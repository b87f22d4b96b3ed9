// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
)

// refusal is what the API server says when the policy about that resource denies a write.
func refusal(resource string) error {
	policy := map[string]string{"resourceslices": "slices", "nodes": "node", "events": "events"}[resource]
	name := "stowage-node-agent-own-" + policy
	return apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "forbidden.stowage.dev", fmt.Errorf("ValidatingAdmissionPolicy '%s' with binding '%s' denied request: no", name, name))
}

// unbound is what it says to an account without the role.
func unbound(resource string) error {
	return apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New(`User "system:serviceaccount:other:agent" cannot create resource at the cluster scope`))
}

// The agent runs where the API server refuses what the policies forbid, waits for policies that have just been made, and serves the kubelet
// while the API server does not answer.
func TestTheAgentRunsOnlyUnderItsPolicies(t *testing.T) {
	away := errors.New("away")
	var back time.Duration // when the API server that was away is asked again
	// Each case says what the API server answers at a time to a write of a resource.
	for name, tc := range map[string]struct {
		answer    func(at time.Duration, resource string) error
		undecided bool
		most      int      // writes, if that matters
		void      []string // in the error; none if the agent runs
	}{
		"all refused": {answer: func(_ time.Duration, resource string) error { return refusal(resource) }},
		"policies come into effect": {answer: func(at time.Duration, resource string) error {
			if at < grace-2*period {
				return nil
			}
			return refusal(resource)
		}},
		"no policy of slices": {answer: func(_ time.Duration, resource string) error {
			if resource == "resourceslices" {
				return nil
			}
			return refusal(resource)
		}, void: []string{"stowage-node-agent-own-slices"}},
		"no policy of events, and nothing is known of others": {answer: func(_ time.Duration, resource string) error {
			if resource == "events" {
				return nil
			}
			return away
		}, void: []string{"stowage-node-agent-own-events"}},
		"none": {
			answer: func(time.Duration, string) error { return nil },
			void:   []string{"stowage-node-agent-own-slices", "stowage-node-agent-own-node", "stowage-node-agent-own-events"},
		},
		"the API server comes back, with policies": {answer: func(at time.Duration, resource string) error {
			if at < time.Hour {
				return away
			}
			return refusal(resource)
		}, undecided: true, most: 3 * 70},
		"void for a moment before the API server is away, and after": {answer: func(at time.Duration, resource string) error {
			switch {
			case at >= period && at < time.Hour:
				return away
			case back == 0 && at >= time.Hour:
				back = at
			}
			if at < back+grace/2 {
				return nil
			}
			return refusal(resource)
		}, undecided: true},
		"a webhook fails for an hour": {answer: func(at time.Duration, resource string) error {
			if at < time.Hour && resource == "events" {
				return apierrors.NewInternalError(errors.New("failed calling webhook"))
			}
			return refusal(resource)
		}, undecided: true, most: 3 * 70},
		"the role is bound after an hour, and no policy is about the account": {answer: func(at time.Duration, resource string) error {
			if at < time.Hour {
				return unbound(resource)
			}
			return nil
		}, undecided: true, void: []string{"stowage-node-agent-own-slices", "stowage-node-agent-own-node", "stowage-node-agent-own-events"}},
		"the role is bound after an hour, and the policies hold": {answer: func(at time.Duration, resource string) error {
			if at < time.Hour {
				return unbound(resource)
			}
			return refusal(resource)
		}, undecided: true},
		"another policy refuses for an hour": {answer: func(at time.Duration, resource string) error {
			if at < time.Hour {
				return apierrors.NewForbidden(schema.GroupResource{}, "", errors.New("ValidatingAdmissionPolicy 'quiet-events' denied request: no"))
			}
			return refusal(resource)
		}, undecided: true},
		"the API server comes back, without": {answer: func(at time.Duration, _ string) error {
			if at < time.Hour {
				return away
			}
			return nil
		}, undecided: true, void: []string{"stowage-node-agent-own-slices", "stowage-node-agent-own-node", "stowage-node-agent-own-events"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begin := time.Now()
				undecided, writes := false, 0
				client := fake.NewSimpleClientset()
				client.PrependReactor("*", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
					resource := action.GetResource().Resource
					if resource == "selfsubjectreviews" {
						return true, &authenticationv1.SelfSubjectReview{Status: authenticationv1.SelfSubjectReviewStatus{UserInfo: authenticationv1.UserInfo{Username: "system:serviceaccount:other:agent"}}}, nil
					}
					writes++
					return true, nil, tc.answer(time.Since(begin), resource)
				})
				err := Await(t.Context(), client, OfNodeAgent("node-1"), func() { undecided = true })
				if undecided != tc.undecided {
					t.Errorf("undecided: %t", undecided)
				}
				if tc.most > 0 && writes > tc.most {
					t.Errorf("%d writes in %s, want at most %d", writes, time.Since(begin), tc.most)
				}
				var void *VoidError
				if got := errors.As(err, &void); got != (len(tc.void) > 0) {
					t.Fatalf("got %v", err)
				} else if !got {
					return
				}
				if !strings.Contains(err.Error(), `"system:serviceaccount:other:agent"`) || len(void.policies) != len(tc.void) {
					t.Errorf("message: %v", err)
				}
				for _, policy := range tc.void {
					if !strings.Contains(err.Error(), policy) {
						t.Errorf("%q is not about %s", err, policy)
					}
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), grace/2)
		defer cancel()
		if err := Await(ctx, fake.NewSimpleClientset(), OfNodeAgent("node-1"), func() {}); err != nil {
			t.Errorf("asked to stop while it waits: %v", err)
		}
	})
}

// Where the API server takes connections and says nothing, the kubelet waits for one timeout and not for one of each write.
func TestAnAPIServerThatSaysNothingIsWaitedForOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://api", Transport: silent{}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		begin := time.Now()
		if err := Await(ctx, client, OfNodeAgent("node-1"), cancel); err != nil || time.Since(begin) > timeout {
			t.Errorf("%v after %s, want that it is undecided after %s", err, time.Since(begin), timeout)
		}
	})
}

// silent takes a request and never answers.
type silent struct{}

func (silent) RoundTrip(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}
