package simulate

import (
	"fmt"
	"sync"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"stowage.dev/stowage/pkg/snapshot"
)

// writes are what plugins would have written that answers tell of.
type writes struct {
	mutex   sync.Mutex
	deleted []types.NamespacedName
	// claims are those that plugins have given back, as they would be then.
	claims []*resourceapi.ResourceClaim
}

// take returns what was written since it was last called.
func (w *writes) take() (deleted []types.NamespacedName, claims []*resourceapi.ResourceClaim) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	deleted, claims = w.deleted, w.claims
	w.deleted, w.claims = nil, nil
	return deleted, claims
}

// newClient returns a client that reads the objects. Its writes are answered as if they had succeeded, and change nothing, so that no watch
// tells of them.
func newClient(objects *snapshot.Objects) (kubernetes.Interface, *writes, error) {
	client, w := fake.NewSimpleClientset(), &writes{} //nolint:staticcheck // nobody asks who wrote a field
	for object := range objects.All() {
		if err := client.Tracker().Add(object); err != nil {
			return nil, nil, fmt.Errorf("copy the cluster: %w", err)
		}
	}
	answer := func(action clienttesting.Action) (bool, runtime.Object, error) {
		w.mutex.Lock()
		defer w.mutex.Unlock()
		switch action := action.(type) {
		case clienttesting.DeleteAction:
			if action.GetResource().Resource == "pods" {
				w.deleted = append(w.deleted, types.NamespacedName{Namespace: action.GetNamespace(), Name: action.GetName()})
			}
			return true, nil, nil
		case clienttesting.UpdateAction: // and to create
			if claim, ok := action.GetObject().(*resourceapi.ResourceClaim); ok {
				w.claims = append(w.claims, claim)
			}
			return true, action.GetObject(), nil
		}
		return true, &v1.Pod{}, nil // patches, of a pod's status alone
	}
	for _, verb := range []string{"create", "update", "patch", "delete", "delete-collection"} {
		client.PrependReactor(verb, "*", answer)
	}
	return client, w, nil
}
