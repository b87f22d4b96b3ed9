// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// What an API server that is busy does not answer is no reason to give a pod up. That the pod is gone is one.
func TestWaitForPodsReadsAgainWhatCouldNotBeRead(t *testing.T) {
	for name, tc := range map[string]struct {
		pods    []runtime.Object
		failure error
		want    func(error) bool
	}{
		"a failure that passes": {
			pods:    []runtime.Object{&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: "pod"}}},
			failure: apierrors.NewTimeoutError("busy", 1),
			want:    func(err error) bool { return err == nil },
		},
		"no such pod": {want: apierrors.IsNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewSimpleClientset(tc.pods...)
			failure := tc.failure
			client.PrependReactor("get", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
				err := failure
				failure = nil
				return err != nil, nil, err
			})
			l := &Lab{client: client}
			pods, err := l.WaitForPods(t.Context(), "demo", []string{"pod"}, "there", time.Minute, func(*corev1.Pod) (bool, error) { return true, nil })
			if !tc.want(err) || (err == nil) != (len(pods) == 1) {
				t.Errorf("pods %v, error %v", pods, err)
			}
		})
	}
}

// The error of a wait in vain says what could not be read.
func TestWaitForPodsTellsWhatItCouldNotRead(t *testing.T) {
	client := fake.NewSimpleClientset()
	failure := errors.New("etcd is away")
	client.PrependReactor("get", "pods", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, failure })
	l := &Lab{client: client}
	if _, err := l.WaitForPods(t.Context(), "demo", []string{"pod"}, "there", time.Millisecond, Running); !errors.Is(err, failure) {
		t.Errorf("error %v, want %v in it", err, failure)
	}
}
