// The same sources as an Android library. pom.xml is what the tests build; this has not been built (README.md).
plugins {
    id("com.android.library") version "8.13.0"
    id("org.jetbrains.kotlin.android") version "2.2.21"
}

android {
    namespace = "cedos.d2tp"
    compileSdk = 36
    defaultConfig {
        // java.time is there from 26 on.
        minSdk = 26
        consumerProguardFiles("consumer-rules.pro")
    }
    sourceSets["main"].java.srcDir("../java/src")
    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_11
        targetCompatibility = JavaVersion.VERSION_11
    }
}

kotlin {
    jvmToolchain(17)
    explicitApi()
    compilerOptions {
        jvmTarget = org.jetbrains.kotlin.gradle.dsl.JvmTarget.JVM_11
    }
}

dependencies {
    api("org.jetbrains.kotlinx:kotlinx-coroutines-android:1.10.2")
    // For those who use it: OkHttp.kt alone needs it.
    compileOnly("com.squareup.okhttp3:okhttp:5.3.2")
}
