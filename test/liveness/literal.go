// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"fmt"
	"reflect"
	"strings"
	"time"

	"stowage.dev/stowage/test/liveness/memoryapi"
)

// literal is a value as Go code of this package, without fields that are zero.
func literal(value any) string {
	switch value := value.(type) {
	case time.Duration:
		if value%time.Second == 0 {
			return fmt.Sprintf("%d * time.Second", value/time.Second)
		}
		return fmt.Sprintf("%d * time.Millisecond", value.Milliseconds())
	case memoryapi.Fault:
		return "memoryapi." + value.String()
	case Kill:
		return value.String()
	case string:
		return fmt.Sprintf("%q", value)
	case []string:
		return fmt.Sprintf("%#v", value)
	}
	v := reflect.ValueOf(value)
	if v.Kind() != reflect.Struct {
		return fmt.Sprint(value)
	}
	var fields []string
	for i := range v.NumField() {
		if f := v.Field(i); !f.IsZero() {
			fields = append(fields, v.Type().Field(i).Name+": "+literal(f.Interface()))
		}
	}
	return v.Type().Name() + "{" + strings.Join(fields, ", ") + "}"
}
