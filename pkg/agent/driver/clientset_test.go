// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"reflect"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// NewClientset is fake.NewClientset, and keeps who wrote a field only where the agent applies: in claims and nodes. For that the fake one makes a REST
// mapper of all kinds at each write, which took a fifth of the time of these tests.
func NewClientset(objects ...runtime.Object) *fake.Clientset {
	client := fake.NewClientset(objects...)
	below := reflect.ValueOf(client.Tracker()).Elem().FieldByName("ObjectTracker").Interface().(clienttesting.ObjectTracker)
	for _, resource := range []string{"events", "pods", "resourceslices"} {
		client.PrependReactor("*", resource, clienttesting.ObjectReaction(below))
	}
	return client
}
